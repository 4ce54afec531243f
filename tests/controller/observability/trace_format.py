"""What a trace must be for Perfetto and Chrome to show it: Google's "Trace Event Format", the parts that are
used.
"""

from collections import defaultdict

import jsonschema

NUMBER = {"type": "integer", "minimum": 0}
SHARED = {"pid": NUMBER, "name": {"type": "string", "minLength": 1}}
KINDS = {
    "X": {
        **SHARED,
        "tid": NUMBER,
        "ts": NUMBER,
        "dur": NUMBER,
        "cat": {"type": "string"},
        "args": {"type": "object"},
    },
    "C": {
        **SHARED,
        "tid": NUMBER,
        "ts": NUMBER,
        "args": {"additionalProperties": {"type": "number"}},
    },
    "M": {
        **SHARED,
        "tid": NUMBER,
        "name": {"enum": ["process_name", "process_sort_index", "thread_name"]},
        "args": {"type": "object"},
    },
}
OPTIONAL = {"M": {"tid"}}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {
            "items": {
                "oneOf": [
                    {
                        "properties": {"ph": {"const": kind}, **fields},
                        "required": ["ph", *(set(fields) - OPTIONAL.get(kind, set()))],
                        "additionalProperties": False,
                    }
                    for kind, fields in KINDS.items()
                ]
            }
        }
    },
}


def check(trace: dict) -> None:
    """Every event has the fields of its kind, every track a name, and slices of one track lie apart or
    inside.
    """
    jsonschema.validate(trace, SCHEMA)
    events = trace["traceEvents"]
    named = {
        (e["pid"], e.get("tid"))
        for e in events
        if e["ph"] == "M" and e["name"] != "process_sort_index"
    }
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(
                (event["ts"], -event["dur"], event["name"])
            )
    for track, slices in tracks.items():
        assert track in named
        assert (track[0], None) in named
        open_until: list[int] = []
        for start, minus_duration, name in sorted(slices):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            end = start - minus_duration
            assert not open_until or end <= open_until[-1], (
                f"{name} at {start} outlasts what it began in"
            )
            open_until.append(end)


def slices_of(trace: dict, process: str, thread: str) -> list[dict]:
    """The slices of one named track, in order."""
    events = trace["traceEvents"]
    (pid,) = [
        e["pid"]
        for e in events
        if e["name"] == "process_name" and e["args"]["name"] == process
    ]
    titles = [e for e in events if e["name"] == "thread_name" and e["pid"] == pid]
    (tid,) = [e["tid"] for e in titles if e["args"]["name"] == thread]
    found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]
    return sorted(found, key=lambda event: event["ts"])
