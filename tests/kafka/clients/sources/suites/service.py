"""`test.service` of kafka-python's suite, which its source package leaves out: a broker that runs
already.
"""

from __future__ import annotations


class ExternalService:
    """A broker that the suite did not start."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def open(self) -> None:
        """It is open."""

    def stop(self) -> None:
        """It goes on."""


class SpawnedService:
    """A broker that the suite would start."""

    def __init__(self, *_arguments: object) -> None:
        raise RuntimeError("this suite starts no broker")
