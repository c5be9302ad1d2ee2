"""The settings file: its template, its mistakes, its secrets, its cache."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading

import pytest

from kueue import config
from kueue.errors import ConfigError
from tests.support.small_disk import FILLER, fill, small_disk

SECRET = "0123456789abcdefghijklmnop"


@pytest.fixture
def write(tmp_path):
    def write(text, mode=0o600, name="config.toml"):
        path = tmp_path / name
        path.write_text(text) if isinstance(text, str) else path.write_bytes(text)
        path.chmod(mode)
        return str(path)

    return write


def common(more=""):
    return f'[common_settings]\nshared_secret = "{SECRET}"\n{more}'


def load(path, *sections, environ=None, **more):
    return config.load(path, sections or tuple(config.SECTIONS), environ=environ or {}, **more)


def refusal(path, *sections, **more):
    with pytest.raises(ConfigError) as caught:
        load(path, *sections, **more)
    return f"{caught.value} {caught.value.hint}"


# --- where it is, and the template ------------------------------------------------------------------------------------


def test_the_file_is_found_by_variable_then_xdg_then_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    assert config.default_path({}) == "/home/ann/.config/kueue/config.toml"
    assert config.default_path({"XDG_CONFIG_HOME": "relative"}) == "/home/ann/.config/kueue/config.toml"
    assert config.default_path({"XDG_CONFIG_HOME": "/x"}) == "/x/kueue/config.toml"
    assert config.default_path({"XDG_CONFIG_HOME": "/x", "KUEUE_CONFIG": "/y.toml"}) == "/y.toml"


def test_a_missing_file_means_defaults_and_makes_nothing(tmp_path):
    found = load(str(tmp_path / "none.toml"))
    assert not found.exists
    assert (found.common.server_port, found.common.shared_secret) == (11236, "")
    assert list(tmp_path.iterdir()) == []


TEMPLATE_KEYS = {
    "common_settings": {"shared_secret", "server_name", "server_port", "log_level"},
    "server_settings": {
        "bind_addresses",
        "maintenance_interval_seconds",
        "worker_timeout_seconds",
        "job_offer_timeout_seconds",
        "job_cleanup_after_minutes",
        "global_max_parallel_jobs",
    },
    "worker_settings": {
        "system_update_interval_seconds",
        "worker_max_parallel_jobs",
        "dynamic_check_free_resources",
        "dynamic_cpu_load_scale_factor",
    },
    "client_settings": {"job_default_cpus", "job_default_ram_mb"},
}


def test_the_template_has_four_sections_16_keys_and_a_secret_and_is_private(tmp_path):
    path = tmp_path / "new" / "deep" / "config.toml"
    before = os.umask(0)
    try:
        remark = config.first_start(str(path), {})
    finally:
        os.umask(before)
    assert str(path) in remark
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["config.toml"]
    table = parsed(path)
    assert {name: set(keys) for name, keys in table.items()} == TEMPLATE_KEYS
    secret = table["common_settings"].pop("shared_secret")
    assert len(secret) == 64
    assert secret.isascii()
    assert secret.isalnum()
    found = load(str(path))
    assert found.warnings == ()
    for name, keys in table.items():
        section = getattr(found, name.removesuffix("_settings"))
        default = type(section)()
        assert {key: getattr(default, key) for key in keys} == keys


def parsed(path):
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads(path.read_text())


def test_two_templates_have_different_secrets(tmp_path):
    for name in "ab":
        config.write_template(str(tmp_path / name))
    assert parsed(tmp_path / "a")["common_settings"] != parsed(tmp_path / "b")["common_settings"]


def test_an_existing_file_is_never_touched(tmp_path, write):
    path = write("# mine\n")
    assert config.first_start(path, {}) == ""
    assert not config.write_template(path)
    assert (tmp_path / "config.toml").read_text() == "# mine\n"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert not config.write_template(str(tmp_path / "dangling"))


def test_of_many_first_starts_at_once_one_makes_the_file(tmp_path):
    made, barrier = [], threading.Barrier(8)

    def start():
        barrier.wait()
        made.append(config.write_template(str(tmp_path / "x" / "c.toml")))

    threads = [threading.Thread(target=start) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(made) == [False] * 7 + [True]
    assert [entry.name for entry in (tmp_path / "x").iterdir()] == ["c.toml"]


def test_a_template_that_cannot_be_made_is_one_sentence(write):
    path = write("")
    with pytest.raises(ConfigError, match="cannot be made"):
        config.write_template(f"{path}/config.toml")


def test_a_full_disk_is_left_without_a_part_of_a_template(tmp_path):
    with small_disk(tmp_path / "disk", 1) as disk:
        fill(disk)
        with pytest.raises(ConfigError, match="No space left"):
            config.write_template(str(disk / "config.toml"))
        assert [entry.name for entry in disk.iterdir()] == [FILLER]


def test_a_template_is_whole_or_not_there_also_without_hard_links(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "config.toml"
    monkeypatch.setattr(os, "link", no_links)
    assert config.write_template(str(path))
    whole = parsed(path)
    path.unlink()
    synced = []

    def full(descriptor):
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        config.write_template(str(path))
    assert list(tmp_path.iterdir()) == []
    assert whole["common_settings"]["shared_secret"]


# --- which value counts -----------------------------------------------------------------------------------------------


def test_a_missing_key_takes_its_default(write):
    found = load(write(common()))
    assert found.common.server_port == 11236
    assert found.server == config.ServerSettings()
    assert found.restart_workers is None
    assert found.global_resources is None


def test_a_flag_wins_over_the_environment_and_that_over_the_file(write):
    path = write(common('log_level = "warn"\nstate_dir = "/file"'))
    assert load(path).common.log_level == "warn"
    environ = {"KUEUE_LOG_LEVEL": "DEBUG", "KUEUE_STATE_DIR": "/environment"}
    found = load(path, environ=environ)
    assert (found.common.log_level, found.common.state_dir) == ("debug", "/environment")
    found = load(path, environ=environ, overrides={"common_settings.log_level": "error"})
    assert found.common.log_level == "error"


def test_a_wrong_value_of_the_environment_names_the_variable(write):
    assert "KUEUE_LOG_LEVEL must be one of trace, debug, info, warn, error" in refusal(
        write(common()), environ={"KUEUE_LOG_LEVEL": "foo"}
    )


def test_settings_do_not_change(write):
    with pytest.raises(AttributeError):
        load(write(common())).common.server_port = 1


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('server_port = "x"', ["line 3", "common_settings.server_port", "must be a whole number", '"x"']),
        ("server_port = 70000", ["line 3", "server_port", "at most 65535"]),
        ("server_port = true", ["line 3", "must be a whole number, not true"]),
        ("server_name = 7", ["line 3", "must be a string"]),
        ('server_name = ""', ["line 3", "must be one host name"]),
        ('log_level = "foo"', ["line 3", "trace, debug, info, warn, error", '"foo"']),
        ("\n\n[server_settings]\nworker_timeout_seconds = 9", ["line 6", "at least 10"]),
        ("[server_settings]\nworker_timeout_seconds = 60.5", ["line 4", "whole number, not 60.5"]),
        ("[worker_settings]\ndynamic_cpu_load_scale_factor = nan", ["line 4", "finite"]),
        ("[worker_settings]\ndynamic_check_free_resources = 1", ["line 4", "true or false"]),
        ('[worker_settings]\nresources = "gpu=x"', ["line 4", "gpu=x"]),
        (
            "[worker_settings]\nsystem_update_interval_seconds = 300",
            ["line 4", "below", "worker_timeout_seconds (300)"],
        ),
        ('[client_settings]\non_lost = "ignore"', ["line 4", "rerun, wait, fail"]),
        ('[restart_workers]\nssh_user = "ann"', ["line 3", "needs the key hostnames"]),
        ("[global_resources]\ngenus = -1", ["line 4", "genus", "at least 0"]),
        ('[global_resources]\n"a b" = 1', ["line 4", "is no name"]),
        ("[global_resources]\ngenus = 1.5", ["line 4", "whole number"]),
        ("server_port 1", ["line 3"]),
    ],
)
def test_a_mistake_names_file_line_and_key(write, text, parts):
    path = write(common(text))
    told = refusal(path)
    assert path in told
    assert told.startswith("Failed to load config: ")
    for part in parts:
        assert part in told


def test_a_mistake_in_a_section_that_is_not_used_stops_nobody(write):
    path = write(
        common('[restart_workers]\nssh_user = 1\n[server_settings]\nbind_addresses = 3\n[worker_settings]\ncores = "a"')
    )
    found = load(path, "client_settings")
    assert found.server.bind_addresses == "0.0.0.0 [::]"
    assert found.worker.cores == 0
    assert "bind_addresses" in refusal(path, "server_settings")


def test_an_unknown_key_or_section_is_a_warning_with_the_closest_known_one(write):
    path = write(common("server_prot = 1\n[sever_settings]\n[client_settings]\nzzz = 1"))
    warnings = "\n".join(load(path).warnings)
    assert f"{path}, line 3: unknown key common_settings.server_prot; did you mean server_port?" in warnings
    assert "line 4: unknown section [sever_settings]; did you mean server_settings?" in warnings
    assert "line 6: unknown key client_settings.zzz is ignored." in warnings
    assert "zzz" not in "\n".join(load(path, "server_settings").warnings)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'x = "\x00"', b"[" * 100_000, b"# " + b"x" * 2**21])
def test_a_file_that_is_no_settings_file_is_one_sentence(write, content):
    assert refusal(write(content)).startswith("Failed to load config: ")


def test_a_file_that_breaks_off_while_it_is_read_is_one_sentence(tmp_path):
    (tmp_path / "config.toml").symlink_to("/proc/self/mem")
    assert "config.toml cannot be read: Input/output error" in refusal(str(tmp_path / "config.toml"))


def test_a_mistake_is_told_also_when_its_file_is_gone_meanwhile(write):
    path = write(common())
    file = config._File(path, None)
    os.unlink(path)
    assert str(file.wrong("common_settings", "server_port", "is no port")).endswith(
        f"{path}: common_settings.server_port is no port."
    )


def test_a_directory_or_a_pipe_in_its_place_is_one_sentence(tmp_path):
    assert "is not a file" in refusal(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refusal(str(tmp_path / "pipe"))


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(write):
    assert (
        load(write(b"\xef\xbb\xbf" + common("server_port = 5").replace("\n", "\r\n").encode())).common.server_port == 5
    )


def test_a_shorter_worker_time_out_shortens_an_interval_nobody_set(write):
    found = load(write(common("[server_settings]\nworker_timeout_seconds = 10")))
    assert found.worker.system_update_interval_seconds == 2


def test_free_sections_are_read(write):
    found = load(
        write(
            common(
                '[global_resources]\ngenus = 3\nprimelib = 0\n[worker_settings]\nresources = "gpu=4 fpga, gpu=2"\n'
                '[restart_workers]\nssh_user = "ann"\nhostnames = """a\nb"""\nsleep_minutes_before_recheck = 1'
            )
        )
    )
    assert found.global_resources == {"genus": 3, "primelib": 0}
    assert found.worker.named == (("fpga", 1), ("gpu", 2))
    assert found.restart_workers.hostnames.split() == ["a", "b"]
    assert found.restart_workers.sleep_minutes_before_recheck == 1.0


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o602])
def test_a_secret_that_others_can_read_or_change_is_refused_with_the_command_that_mends_it(write, mode):
    path = write(common(), mode)
    assert f"chmod 600 {path}" in refusal(path)


def test_a_file_that_is_readable_but_holds_no_secret_is_not_refused_for_that(write):
    assert "shared_secret is missing" in refusal(write("[common_settings]\n", 0o644))


def test_a_short_secret_is_refused(write):
    told = refusal(write('[common_settings]\nshared_secret = "1234567"\n'))
    assert "has only 7 characters; at least 8 are needed" in told
    assert "1234567" not in told


def test_the_secret_of_the_manual_works_and_is_warned_about_with_a_figure(write):
    found = load(write('[common_settings]\nshared_secret = "keep private!"\n'))
    assert found.common.shared_secret == "keep private!"
    (warning,) = found.warnings
    assert "has only 13 characters" in warning
    assert "years if it is random" in warning
    assert "keep private!" not in warning


def test_the_previous_secret_is_checked_as_well(write):
    found = load(write(common(f'shared_secret_previous = "{SECRET[::-1]}"')))
    assert found.common.shared_secret_previous == SECRET[::-1]
    assert "shared_secret_previous has only" in refusal(write(common('shared_secret_previous = "short"')))


def test_a_secret_of_a_wrong_type_is_not_shown(write):
    assert "87654321" not in refusal(write("[common_settings]\nshared_secret = 87654321\n"))


def test_a_secret_is_not_in_the_representation(write):
    assert SECRET not in repr(load(write(common())).common)


# --- the cache --------------------------------------------------------------------------------------------------------


def age(path, by=10):
    found = os.stat(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - by * 10**9))


def test_a_file_that_has_not_changed_is_read_from_the_cache(write, tmp_path):
    path, cache = write(common("server_port = 5")), tmp_path / "cache"
    cache.mkdir()
    age(path)
    assert load(path, cache_dir=str(cache)).common.server_port == 5
    (entry,) = cache.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    kept = json.loads(entry.read_text())
    kept["data"]["common_settings"]["server_port"] = 6
    entry.write_text(json.dumps(kept))
    assert load(path, cache_dir=str(cache)).common.server_port == 6, "the cache was not used"
    os.chmod(path, 0o644)
    assert "chmod 600" in refusal(path, cache_dir=str(cache)), "the cache must not hide the mode"


@pytest.mark.parametrize("change", ["content", "inode", "version", "torn"])
def test_a_cache_of_another_file_or_version_is_not_used(write, tmp_path, change, monkeypatch):
    path, cache = write(common("server_port = 5")), tmp_path / "cache"
    cache.mkdir()
    age(path)
    load(path, cache_dir=str(cache))
    (entry,) = cache.iterdir()
    kept = json.loads(entry.read_text())
    kept["data"]["common_settings"]["server_port"] = 6
    entry.write_text(json.dumps(kept))
    if change == "torn":
        entry.write_text(entry.read_text()[:-10])
    elif change == "version":
        monkeypatch.setattr(config, "__version__", "0.0.0-other")
    elif change == "inode":
        other = write(common("server_port = 5"), name="other")
        age(other)
        os.replace(other, path)
    else:
        write(common("server_port = 5 "))
        age(path)
    assert load(path, cache_dir=str(cache)).common.server_port == 5


def test_a_file_changed_this_moment_is_not_cached(write, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    load(write(common()), cache_dir=str(cache))
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(write, tmp_path):
    path = write(common("server_port = 5"))
    age(path)
    assert load(path, cache_dir=str(tmp_path / "none")).common.server_port == 5


def test_reading_a_cached_file_loads_neither_toml_nor_other_slow_modules(write, tmp_path):
    path = write(common())
    age(path)
    load(path, cache_dir=str(tmp_path))
    code = (
        "import sys; before = set(sys.modules); from kueue import config, places; "
        f"config.load({path!r}, ['client_settings'], cache_dir={str(tmp_path)!r}); "
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {os.getcwd()!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(run.stdout.split())
    slow = {
        "tomllib",
        "tomli",
        "dataclasses",
        "inspect",
        "typing",
        "pathlib",
        "msgspec",
        "ssl",
        "hashlib",
        "difflib",
        "logging",
        "secrets",
    }
    assert not loaded & slow
    assert "kueue.config" in loaded
