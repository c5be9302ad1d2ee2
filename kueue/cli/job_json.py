"""The JSON that ``--json`` prints: documented, and only ever extended.

Rules
- Times are UTC seconds since 1970, durations seconds, sizes MB (2**20 bytes); what is not known is null.
- A string whose bytes are not UTF-8 is an object ``{"b64": …}``.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def listing(answer: dict[str, Any]) -> dict[str, Any]:
    """``list-jobs --json``: the selected jobs, and the sums over all jobs."""
    return {
        "jobs": [job(row) for row in answer["jobs"]],
        "counts": dict(answer.get("counts", ())),
        "average_seconds": answer.get("average_seconds", 0),
        "eta_seconds": answer.get("eta_seconds", 0),
    }


def job(row: dict[str, Any]) -> dict[str, Any]:
    """One job of a listing."""
    request, payload = row["request"], row["payload"]
    return {
        "id": row["id"],
        "state": row["state"],
        "stopping": row.get("stopping", False),
        "note": row.get("note", ""),
        "name": payload.get("name"),
        "argv": payload["argv"],
        "cwd": row["cwd"],
        "stdout": payload.get("stdout"),
        "stderr": payload.get("stderr"),
        "slots": request.get("slots", 1),
        "cores": request.get("cores", 1),
        "ram_mb": request.get("ram_mb", 0),
        "cores_are_default": request.get("cores_are_wish", False),
        "ram_is_default": request.get("ram_is_wish", False),
        "taken_cores": row.get("taken_cores"),
        "taken_ram_mb": row.get("taken_ram_mb"),
        "gpus": dict(request.get("named", ())).get("gpu", 0),
        "resources": dict(request.get("counters", ())),
        "priority": request.get("priority", 10),
        "worker": row.get("worker"),
        "attempt": row.get("attempt", 0),
        "issued": row["issued_wall"],
        "offered": row.get("offered_wall"),
        "started": row.get("started_wall"),
        "ended": row.get("ended_wall"),
        "run_seconds": row.get("run_seconds"),
        "return_code": row.get("return_code"),
        "outcome": row.get("outcome"),
    }


def detail(one: dict[str, Any]) -> dict[str, Any]:
    """One job of ``show-job --json``: as in the listing, with all that is known beside it."""
    place, terms, end = one["place"], one.get("terms", {}), one.get("end")
    known = {
        **job(one["row"]),
        "environment": place.get("env", []),
        "umask": place.get("umask"),
        "timeout_seconds": terms.get("timeout_seconds"),
        "max_attempts": terms.get("max_attempts", 3),
        "on_lost": terms.get("on_lost", "rerun"),
        "keep_background": terms.get("keep_background", False),
        "comment": one.get("comment", ""),
        "waits": one.get("waits", []),
        "attempts": [
            {
                "number": attempt.get("number"),
                "worker": attempt["worker"],
                "offered": attempt["offered_wall"],
                "started": attempt.get("started_wall"),
                "ended": attempt.get("ended_wall"),
                "end": attempt.get("end", ""),
            }
            for attempt in one.get("attempts", ())
        ],
        "events": [{"time": wall, "who": who, "what": what} for wall, who, what in one.get("events", ())],
        "cpu_seconds": None,
        "max_rss_mb": None,
        "output": None,
    }
    if end is not None:
        known["cpu_seconds"] = end.get("cpu_seconds")
        known["max_rss_mb"] = end.get("max_rss_mb")
        known["output"] = {
            stream: {
                "size": kept.get("size", 0),
                "head_b64": kept.get("head", ""),
                "tail_b64": kept.get("tail", ""),
                "redirected": kept.get("redirected"),
                "discarded": kept.get("discarded", False),
            }
            for stream, kept in (("stdout", end.get("stdout", {})), ("stderr", end.get("stderr", {})))
        }
    return known


def explanation(answer: dict[str, Any]) -> dict[str, Any]:
    """One job of ``explain --json``."""
    return {
        "id": answer["id"],
        "verdict": answer["verdict"],
        "workers": [{"name": n, "fits": fits, "why": why} for n, fits, why in answer.get("workers", ())],
        "resources": [{"name": n, "fits": fits, "why": why} for n, fits, why in answer.get("counters", ())],
    }


def worker(row: dict[str, Any]) -> dict[str, Any]:
    """One worker of ``list-workers --json`` and ``show-worker --json``."""
    info, totals, load = row.get("info", {}), row["totals"], row.get("load", {})
    return {
        "id": row["id"],
        "name": row["name"],
        "state": row.get("state", "online"),
        "note": row.get("note", ""),
        "version": row.get("version", ""),
        "connected": row.get("connected_wall"),
        "updated": row.get("updated_wall"),
        "kernel": info.get("kernel", "unknown"),
        "distribution": info.get("distribution", "unknown"),
        "cpu_mhz": info.get("cpu_mhz", 0),
        "slots": totals["slots"],
        "cores": totals["cores"],
        "ram_mb": totals["ram_mb"],
        "resources": dict(totals.get("named", ())),
        "load": load.get("load", [0.0, 0.0, 0.0]),
        "free_slots": row.get("free_slots", 0),
        "free_cores": row.get("free_cores", 0),
        "free_ram_mb": row.get("free_ram_mb", 0),
        "occupation": row.get("occupation", 0.0),
        "offered": row.get("offered", []),
        "running": row.get("running", []),
    }
