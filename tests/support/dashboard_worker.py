"""What the dashboard of one worker shows."""

from __future__ import annotations

from tests.support.grafana import (
    AT,
    FREE_BELOW,
    GREEN,
    RED,
    SERVER,
    YELLOW,
    Json,
    Panel,
    Query,
    dashboard,
    lines,
    number,
    variable,
)

OF = f'{AT},worker="$worker"'
"""The worker that was chosen, as the server sees it."""
ITS = 'worker="$worker"'
"""The same worker's own figures: Prometheus gives them that label when it scrapes them."""
WORKER = variable(
    "worker", "Worker", 'label_values(kueue_worker_up{instance="$server"}, worker)', "The worker, by its name."
)


def worker() -> Json:
    return dashboard(
        "kueue-worker",
        "kueue: one worker",
        "A worker as the server sees it, and as it sees itself; the latter if it shows its own figures (worker_bind) "
        "and Prometheus scrapes them with the label worker.",
        [SERVER, WORKER],
        'ALERTS{alertname=~"Kueue.*",alertstate="firing",worker="$worker"}',
        [("As the server sees it", seen()), ("As it sees itself", itself())],
    )


def seen() -> list[Panel]:
    return [
        number(
            "State",
            "down: not connected; on that machine `kueue doctor` tells why. Nothing: not heard of for "
            "worker_timeout_seconds.",
            Query(f"sum(kueue_worker_up{{{OF}}})", "up"),
            words={"0": ("down", RED), "1": ("connected", GREEN)},
            no_value="gone",
        ),
        number("Slots taken", "Job slots that attempts hold.", Query(taken("slots"), "slots"), unit="percentunit"),
        number(
            "Cores taken",
            "Cores that attempts hold, whatever they do with them.",
            Query(taken("cpus"), "cores"),
            unit="percentunit",
        ),
        number(
            "Memory taken",
            "Memory that attempts hold, whatever they do with it.",
            Query(f"sum(kueue_worker_ram_used_bytes{{{OF}}}) / sum(kueue_worker_ram_bytes{{{OF}}})", "memory"),
            unit="percentunit",
        ),
        number(
            "Cores", "That jobs may have: `cores` of its settings.", Query(f"sum(kueue_worker_cpus{{{OF}}})", "cores")
        ),
        number(
            "Memory",
            "That jobs may have: `ram_mb` of its settings.",
            Query(f"sum(kueue_worker_ram_bytes{{{OF}}})", "memory"),
            unit="bytes",
        ),
        lines(
            "Slots",
            "Full slots beside free cores: raise worker_max_parallel_jobs of this worker.",
            Query(f"sum(kueue_worker_slots_used{{{OF}}})", "taken"),
            Query(f"sum(kueue_worker_slots{{{OF}}})", "limit"),
        ),
        lines(
            "Cores and load",
            "A load far above what jobs hold: they use more threads than they asked for, or somebody else computes "
            "there; the worker then takes less.",
            Query(f"sum(kueue_worker_cpus_used{{{OF}}})", "taken"),
            Query(f"sum(kueue_worker_cpus{{{OF}}})", "limit"),
            Query(f"sum(kueue_worker_load1{{{OF}}})", "load over one minute"),
        ),
        lines(
            "Memory",
            "What jobs asked for, of what the machine gives.",
            Query(f"sum(kueue_worker_ram_used_bytes{{{OF}}})", "taken"),
            Query(f"sum(kueue_worker_ram_bytes{{{OF}}})", "limit"),
            unit="bytes",
        ),
        lines(
            "Named resources",
            "Such as gpu. Empty if the worker has none: `resources` of its settings.",
            Query(f"sum by (resource) (kueue_worker_resource_used{{{OF}}})", "{{resource}}"),
            Query(f"sum by (resource) (kueue_worker_resource_limit{{{OF}}})", "{{resource}}, limit"),
            width=12,
        ),
        lines(
            "Connected",
            "Gaps are times in which the server did not have it.",
            Query(f"sum(kueue_worker_up{{{OF}}})", "connected"),
            most=1,
            width=12,
        ),
    ]


def taken(what: str) -> str:
    return f"sum(kueue_worker_{what}_used{{{OF}}}) / sum(kueue_worker_{what}{{{OF}}})"


def itself() -> list[Panel]:
    off = "not scraped"
    return [
        number(
            "Taken in by the server",
            "no: it runs, but the server is not reached or refuses it; its log says why.",
            Query(f"kueue_worker_connected{{{ITS}}}", "connected"),
            words={"0": ("no", RED), "1": ("yes", GREEN)},
            no_value=off,
        ),
        number(
            "Lease",
            "For how long jobs go on if the server is not heard of from now on; then those that may run elsewhere "
            "pause.",
            Query(f"kueue_worker_lease_remaining_seconds{{{ITS}}}", "lease"),
            unit="s",
            steps=((None, RED), (5, YELLOW), (30, GREEN)),
            no_value=off,
        ),
        number(
            "Runners",
            "Keepers of the jobs that answer: 1 while there are jobs, 2 for a while after an upgrade, 0 when idle.",
            Query(f"kueue_worker_runners{{{ITS}}}", "runners"),
            no_value=off,
        ),
        number(
            "Version",
            "Of the worker. Older than the server's: restart the worker, its jobs go on.",
            Query(f"kueue_worker_build_info{{{ITS}}}", "{{version}}"),
            text_mode="name",
            no_value=off,
        ),
        number(
            "Free for output",
            "On the file system of the spool. Output of jobs goes there; when it is full their output is cut.",
            Query(f'kueue_worker_disk_free_bytes{{{ITS},of="spool"}}', "free"),
            unit="bytes",
            steps=FREE_BELOW,
            no_value=off,
        ),
        number(
            "Memory of the worker",
            "Of the program alone, not of the jobs.",
            Query(f"process_resident_memory_bytes{{{ITS}}}", "memory"),
            unit="bytes",
            no_value=off,
        ),
        lines(
            "Attempts",
            "paused: the server was not heard of for too long. ended and gone: wait until the server has stored that. "
            "unknown: the runner does not answer.",
            Query(f"sum by (state) (kueue_worker_attempts{{{ITS}}})", "{{state}}"),
            is_stacked=True,
            colors={"running": GREEN, "paused": RED, "unknown": "purple"},
        ),
        lines(
            "Sessions per hour",
            "One after the start of the worker or of the server; more are breaks of the connection.",
            Query(f"increase(kueue_worker_sessions_total{{{ITS}}}[1h])", "sessions"),
            as_bars=True,
        ),
        lines(
            "Lease over time",
            "A saw that does not reach zero. Deep teeth: heartbeats are late.",
            Query(f"kueue_worker_lease_remaining_seconds{{{ITS}}}", "lease"),
            unit="s",
        ),
        lines(
            "Spool",
            "Output that is kept here until its job is cleaned away.",
            Query(f"kueue_worker_spool_bytes{{{ITS}}}", "taken"),
            Query(f'kueue_worker_disk_free_bytes{{{ITS},of="spool"}}', "free"),
            unit="bytes",
        ),
        lines(
            "Output that was cut",
            "Output beyond output_limit_mb loses its middle. If it matters let jobs write to files (-o).",
            Query(f"rate(kueue_worker_output_punched_bytes_total{{{ITS}}}[$__rate_interval])", "cut"),
            unit="Bps",
        ),
        lines(
            "Processor of the worker",
            "Of the program alone, not of the jobs: a few hundredths of a core.",
            Query(f"rate(process_cpu_seconds_total{{{ITS}}}[$__rate_interval])", "cores in use"),
            unit="percentunit",
        ),
    ]
