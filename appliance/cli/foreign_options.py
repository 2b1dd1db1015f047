"""Options of kcat and of Kafka's tools, and what to write for them here."""

from __future__ import annotations

_TOPIC = "the topic is an argument: tailrace consume TOPIC, tailrace produce TOPIC"
_ADDRESS = "write --bootstrap ADDRESS"
_MAX = "write --max N"
_WORDS = {
    "-b": _ADDRESS,
    "--bootstrap-server": _ADDRESS,
    "--bootstrap-servers": _ADDRESS,
    "--broker-list": _ADDRESS,
    "-t": _TOPIC,
    "--topic": _TOPIC,
    "-p": "write --partition N",
    "-o": "write --offset N, --from-beginning, --tail N (the last N records) or --since TIME",
    "-c": _MAX,
    "--max-messages": _MAX,
    "-e": "leave it out: tailrace consume ends at the end of the topic unless it has --follow",
    "-C": "write tailrace consume TOPIC",
    "-P": "write tailrace produce TOPIC",
    "-L": "write tailrace topic list, or tailrace status",
    "-G": "write --group GROUP",
    "-K": "write --key-separator TEXT",
    "-k": "write --key TEXT",
    "-H": "write --header NAME=VALUE",
    "-J": "write --format json",
    "--command-config": "write settings as options, or TAILRACE_CONTEXT for an address",
}


def meant_by(option: str) -> str:
    """A sentence for an option that those tools have, "" for others."""
    words = _WORDS.get(option)
    return f"There is no option {option}; {words}." if words else ""
