"""Users, rights, quotas, audit, access to sockets."""
