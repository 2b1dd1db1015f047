"""Agent of the front process: requests as they arrive, and the services that answer them."""
