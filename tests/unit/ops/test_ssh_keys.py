"""Which keys are tried, from real files."""

import paramiko

from kueue_ops.address import HostAddress
from kueue_ops.ssh_login import Agent, KeyLogin
from kueue_ops.ssh_settings import SshConfig


def test_a_certificate_of_no_use_is_told_and_its_key_tried_all_the_same(tmp_path):
    key = paramiko.ECDSAKey.generate()
    path = tmp_path / "id"
    key.write_private_key_file(str(path))
    (tmp_path / "id-cert.pub").write_text("ecdsa-sha2-nistp256-cert-v01@openssh.com AAAA\n")
    target = SshConfig(tmp_path / "none").target(HostAddress("a", None, "a"), key_file=str(path))
    login = KeyLogin(target, 5.0)
    assert [one.asbytes() for one in login._keys(Agent("", 5.0))] == [key.asbytes()]
    (remark,) = login._broken
    assert remark.startswith(f"{path}-cert.pub cannot be used")
