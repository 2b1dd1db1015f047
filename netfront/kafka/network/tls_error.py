"""The error of certificates that cannot be used."""


class TlsError(Exception):
    """Certificates that cannot be used."""
