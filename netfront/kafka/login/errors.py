"""The error of a login that is refused."""


class LoginFailedError(Exception):
    """A login that is refused. The sentence is for the client."""
