"""Access to the console: tokens, logins, and the checks of a request before it is answered."""
