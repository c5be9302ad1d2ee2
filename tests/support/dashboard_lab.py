"""What the dashboard of the laboratory shows."""

from __future__ import annotations

from tests.support.grafana import (
    AT,
    BLUE,
    FREE_BELOW,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SERVER,
    YELLOW,
    Column,
    Json,
    Panel,
    Query,
    bars,
    dashboard,
    lines,
    number,
    table,
)

PROGRAM = f'job="kueue",{AT}'
"""Its process. Of another job the same names are somebody else's, node_exporter's for example."""
FULL_ABOVE = ((None, GREEN), (0.8, YELLOW), (1.0, ORANGE))
ANY_IS_ODD = ((None, GREEN), (1, YELLOW))
OUTCOMES = {
    "succeeded": GREEN,
    "canceled": "light-blue",
    "failed": ORANGE,
    "signaled": "dark-orange",
    "timed_out": YELLOW,
    "lost": RED,
    "not_started": "purple",
}
STATES = {"running": GREEN, "offered": "light-green", "pending": YELLOW, "held": BLUE}
REASONS = {
    "busy": YELLOW,
    "resource": BLUE,
    "directory": ORANGE,
    "too_large": "dark-orange",
    "no_worker": RED,
    "runnable": "purple",
    "unexamined": GREY,
}
SEEN = {"online": GREEN, "offline": BLUE, "set_aside": ORANGE, "silent": RED, "away": GREY}


def quantile(share: float, name: str, window: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({name}_bucket{{{AT}}}[{window}])))"


def mean(name: str, window: str) -> str:
    return f"sum(rate({name}_sum{{{AT}}}[{window}])) / sum(rate({name}_count{{{AT}}}[{window}]))"


def per_minute(name: str) -> str:
    return f"60 * sum(rate({name}{{{AT}}}[$__rate_interval]))"


def share(used: str, total: str) -> str:
    return f"sum({used}{{{AT}}}) / sum({total}{{{AT}}})"


def lab() -> Json:
    return dashboard(
        "kueue-lab",
        "kueue: the laboratory",
        "The queue, its workers, licences and server. From the table of workers a name leads to that worker.",
        [SERVER],
        'ALERTS{alertname=~"Kueue.*",alertstate="firing"}',
        [
            ("Now", now()),
            ("Queue", queue()),
            ("Waits and runs", times()),
            ("Failures and losses", failures()),
            ("Workers", workers()),
            ("Licences and other resources", resources()),
            ("Server", server()),
        ],
    )


def now() -> list[Panel]:
    return [
        number(
            "Server",
            "Whether it takes and offers jobs. READ-ONLY: its disk is full; make room, it goes on by itself. Nothing: "
            "it is down or not scraped; `kueue doctor` on its machine tells.",
            Query(f"kueue_read_only{{{AT}}}", "server"),
            words={"0": ("at work", GREEN), "1": ("READ-ONLY", RED)},
            no_value="no figures",
        ),
        number(
            "Running",
            "Jobs that run.",
            Query(f'sum(kueue_jobs{{{AT},state="running"}})', "running"),
        ),
        number(
            "Waiting",
            "Jobs that wait for a machine, not counting those on hold. `kueue explain ID` says why one waits.",
            Query(f'sum(kueue_jobs{{{AT},state="pending"}})', "pending"),
        ),
        number(
            "Workers online",
            "Workers that are connected and take jobs. `kueue list-workers` shows all.",
            Query(f'sum(kueue_workers{{{AT},state="online"}})', "online"),
            steps=((None, RED), (1, GREEN)),
        ),
        number(
            "Failed, of those that ended in the last hour",
            "Share of jobs that ended in any way but success; canceled ones are left out. Nothing: none ended. "
            "`kueue list-jobs -f` shows the failed ones.",
            Query(
                f'sum(increase(kueue_jobs_finished_total{{{AT},outcome!~"succeeded|canceled"}}[1h])) / '
                f'sum(increase(kueue_jobs_finished_total{{{AT},outcome!="canceled"}}[1h]))',
                "failed",
            ),
            unit="percentunit",
            steps=((None, GREEN), (0.1, YELLOW), (0.5, RED)),
        ),
        number(
            "Cores taken",
            "Share of all cores of connected workers that jobs hold, whatever they do with them.",
            Query(share("kueue_worker_cpus_used", "kueue_worker_cpus"), "cores"),
            unit="percentunit",
        ),
    ]


def queue() -> list[Panel]:
    return [
        lines(
            "Jobs that are not done",
            "A heap that grows: see beside it why the jobs wait, and below whether the workers are full.",
            Query(f"sum by (state) (kueue_jobs{{{AT}}})", "{{state}}"),
            is_stacked=True,
            colors=STATES,
        ),
        lines(
            "Why jobs wait",
            "busy: no worker has room; more machines would help. resource: a licence, or the limit of the lab, is used "
            "up. directory: no worker with room sees it; `kueue explain ID` names it. too_large: for every worker; "
            "submit with less. no_worker: none is connected. runnable: would fit; if that lasts, look into the "
            "server's log. unexamined: too many kinds of jobs to look at.",
            Query(f"sum by (reason) (kueue_pending_by_reason{{{AT}}})", "{{reason}}"),
            is_stacked=True,
            colors=REASONS,
        ),
        lines(
            "Throughput",
            "Jobs that came, began to run and ended, per minute.",
            Query(per_minute("kueue_jobs_submitted_total"), "submitted"),
            Query(per_minute("kueue_attempts_started_total"), "started"),
            Query(per_minute("kueue_jobs_finished_total"), "finished"),
            unit="suffix:/min",
        ),
        lines(
            "Finished jobs in the record",
            "What `kueue list-jobs` still shows. `kueue clean-jobs` forgets them; by itself the server does after "
            "job_cleanup_after_minutes.",
            Query(f"sum by (outcome) (kueue_jobs_kept{{{AT}}})", "{{outcome}}"),
            is_stacked=True,
            colors=OUTCOMES,
        ),
        lines(
            "Offers that wait for an answer",
            "Usually zero: workers answer in milliseconds. Many for long: workers or the network are slow.",
            Query(f"sum(kueue_offers_outstanding{{{AT}}})", "offers"),
        ),
        lines(
            "Attempts that began, per hour",
            "Beside the jobs of that hour: more attempts than jobs are attempts that were lost and repeated.",
            Query(f"sum(increase(kueue_attempts_started_total{{{AT}}}[1h]))", "attempts"),
            Query(f"sum(increase(kueue_jobs_submitted_total{{{AT}}}[1h]))", "submitted jobs"),
        ),
    ]


def times() -> list[Panel]:
    return [
        lines(
            "Wait until the first start",
            "Of jobs that began within the hour before each point; time on hold included. Long waits with idle "
            "workers: see why jobs wait.",
            Query(quantile(0.5, "kueue_job_wait_seconds", "1h"), "half of them below"),
            Query(quantile(0.95, "kueue_job_wait_seconds", "1h"), "95 % below"),
            Query(mean("kueue_job_wait_seconds", "1h"), "mean"),
            unit="s",
            width=12,
        ),
        lines(
            "Run time",
            "Of jobs that ended within the hour before each point; their last attempt, pauses included.",
            Query(quantile(0.5, "kueue_job_run_seconds", "1h"), "half of them below"),
            Query(quantile(0.95, "kueue_job_run_seconds", "1h"), "95 % below"),
            Query(mean("kueue_job_run_seconds", "1h"), "mean"),
            unit="s",
            width=12,
        ),
    ]


def failures() -> list[Panel]:
    return [
        lines(
            "Ended jobs per hour",
            "failed: an exit status other than 0. signaled: ended by a signal, often for want of memory. not_started: "
            "the command or directory was not to be had. lost: the worker was lost too often. `kueue list-jobs -f` "
            "and `kueue show-job ID` tell more.",
            Query(f"sum by (outcome) (increase(kueue_jobs_finished_total{{{AT}}}[1h]))", "{{outcome}}"),
            is_stacked=True,
            colors=OUTCOMES,
        ),
        lines(
            "Lost attempts per hour",
            "Attempts whose worker fell silent, or that were gone when it came back: power, reboots, network. Their "
            "jobs run again. `kueue list-workers` shows who is missing.",
            Query(f"sum(increase(kueue_attempts_lost_total{{{AT}}}[1h]))", "lost"),
            colors={"lost": RED},
            as_bars=True,
        ),
        lines(
            "Connections per hour",
            "Sessions of workers: each beyond the first is a reconnect; a network that breaks shows here. Refused: the "
            "peer did not prove the secret; a machine with an old secret, or a port scan.",
            Query(f"sum(increase(kueue_worker_connects_total{{{AT}}}[1h]))", "sessions of workers"),
            Query(f"sum(increase(kueue_connections_refused_total{{{AT}}}[1h]))", "refused"),
            colors={"refused": RED},
        ),
    ]


def workers() -> list[Panel]:
    return [
        lines(
            "Workers by state",
            "offline: taken out by `kueue node offline NAME`. set_aside: jobs end there at once; look at that machine, it "
            "is tried again by itself. silent: not heard of, holds jobs. away: gone, holds none.",
            Query(f"sum by (state) (kueue_workers{{{AT}}})", "{{state}}"),
            is_stacked=True,
            colors=SEEN,
        ),
        lines(
            "Taken, all workers together",
            "What jobs hold, of what the workers give. Full slots beside free cores: raise worker_max_parallel_jobs.",
            Query(share("kueue_worker_slots_used", "kueue_worker_slots"), "slots"),
            Query(share("kueue_worker_cpus_used", "kueue_worker_cpus"), "cores"),
            Query(share("kueue_worker_ram_used_bytes", "kueue_worker_ram_bytes"), "memory"),
            unit="percentunit",
        ),
        lines(
            "Cores taken, by worker",
            "The twenty that are fullest. A worker that stays empty while jobs wait: `kueue list-workers` says why.",
            Query(
                f"topk(20, sum by (worker) (kueue_worker_cpus_used{{{AT}}}) "
                f"/ sum by (worker) (kueue_worker_cpus{{{AT}}}))",
                "{{worker}}",
            ),
            unit="percentunit",
        ),
        table(
            "Workers",
            "As they are now. down: not connected, and forgotten here after worker_timeout_seconds; on that machine "
            "`kueue doctor` tells. A load far above the cores: somebody else computes there.",
            "worker",
            "/d/kueue-worker?var-worker=${__value.raw}&var-server=${server}&var-datasource=${datasource}&${__url_time_range}",
            Column(
                "state",
                by_worker("kueue_worker_up"),
                words={"0": "down", "1": "up"},
                steps=((None, RED), (1, GREEN)),
            ),
            Column("slots", by_worker("kueue_worker_slots")),
            Column("slots taken", by_worker("kueue_worker_slots_used")),
            Column("cores", by_worker("kueue_worker_cpus")),
            Column("cores taken", by_worker("kueue_worker_cpus_used")),
            Column("load", by_worker("kueue_worker_load1")),
            Column("memory", by_worker("kueue_worker_ram_bytes"), "bytes"),
            Column("memory taken", by_worker("kueue_worker_ram_used_bytes"), "bytes"),
            width=20,
            height=10,
        ),
        number(
            "Workers left out",
            "Workers without figures of their own: two have one name (give one another worker_name), or there are "
            "more than a thousand.",
            Query(f"sum(kueue_workers_left_out{{{AT}}})", "left out"),
            steps=ANY_IS_ODD,
        ),
    ]


def by_worker(name: str) -> str:
    return f"sum by (worker) ({name}{{{AT}}})"


def resources() -> list[Panel]:
    return [
        bars(
            "Taken now",
            "Licences and other counters of the lab. Full while jobs wait for it (see why jobs wait): buy, share, or "
            "raise it in [global_resources]; global_max_parallel_jobs is the limit of job slots in all.",
            Query(
                f"sum by (resource) (kueue_resource_used{{{AT}}}) / sum by (resource) (kueue_resource_limit{{{AT}}})",
                "{{resource}}",
            ),
            most=1,
            unit="percentunit",
            steps=FULL_ABOVE,
        ),
        lines(
            "Licences taken",
            "Units that attempts hold. `kueue list-resources` shows how many there are.",
            Query(f"sum by (resource) (kueue_resource_used{{{AT}}})", "{{resource}}"),
            Query(f"sum by (resource) (kueue_resource_limit{{{AT}}})", "{{resource}}, limit"),
        ),
        lines(
            "Resources of machines taken",
            "Named resources of workers, such as gpu, over all machines. Empty if no worker has any.",
            Query(
                f"sum by (resource) (kueue_worker_resource_used{{{AT}}}) "
                f"/ sum by (resource) (kueue_worker_resource_limit{{{AT}}})",
                "{{resource}}",
            ),
            unit="percentunit",
            most=1,
        ),
    ]


def server() -> list[Panel]:
    slow = ((None, GREEN), (0.25, YELLOW), (1, RED))
    return [
        lines(
            "Time to have facts on the disk",
            "Every answer waits for that. Above a second: the disk is slow or shared; the state belongs on a local "
            "one (`kueue doctor` tells the kind), state_dir chooses another.",
            Query(quantile(0.5, "kueue_store_commit_seconds", "10m"), "half of them below"),
            Query(quantile(0.99, "kueue_store_commit_seconds", "10m"), "99 % below"),
            unit="s",
            steps=slow,
        ),
        lines(
            "Delay of the event loop",
            "How late the server comes to its work. Above a second: the machine is overloaded or swaps.",
            Query(quantile(0.5, "kueue_event_loop_lag_seconds", "10m"), "half of them below"),
            Query(quantile(0.99, "kueue_event_loop_lag_seconds", "10m"), "99 % below"),
            unit="s",
            steps=slow,
        ),
        lines(
            "Disk of the state",
            "When nothing is free the server takes no jobs (running ones go on). `kueue clean-jobs` makes the store "
            "smaller; make room beside it.",
            Query(f'kueue_disk_free_bytes{{{AT},of="state"}}', "free"),
            Query(f"kueue_store_bytes{{{AT}}}", "store"),
            unit="bytes",
            steps=FREE_BELOW,
        ),
        lines(
            "Open connections",
            "Workers, and commands that wait for something (`--wait`, `follow`).",
            Query(f"sum by (kind) (kueue_connections{{{AT}}})", "{{kind}}"),
        ),
        lines(
            "Processor and descriptors of the server",
            "A core that is full is as much as the server can use. Descriptors stay below what `ulimit -n` says. "
            "Empty if the figures come through node_exporter.",
            Query(f"rate(process_cpu_seconds_total{{{PROGRAM}}}[$__rate_interval])", "cores in use"),
            Query(f"process_open_fds{{{PROGRAM}}} / process_max_fds{{{PROGRAM}}}", "descriptors"),
            unit="percentunit",
        ),
        lines(
            "Memory of the server",
            "Grows with the jobs in the record: `kueue clean-jobs`. Empty if the figures come through node_exporter.",
            Query(f"process_resident_memory_bytes{{{PROGRAM}}}", "memory"),
            unit="bytes",
        ),
        number(
            "Version",
            "Of the server. Workers of other versions work with it; renew them at the next occasion.",
            Query(f"kueue_build_info{{{AT}}}", "{{version}}"),
            text_mode="name",
        ),
        number(
            "Up for",
            "Since the server was started. Short again and again: it crashes; look into its log.",
            Query(f"time() - kueue_start_time_seconds{{{AT}}}", "up"),
            unit="s",
        ),
    ]
