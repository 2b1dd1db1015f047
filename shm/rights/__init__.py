"""Users and their rights: rules of access, and the decision about a request."""
