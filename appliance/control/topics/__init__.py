"""Topics: requests that change them, their defaults and quotas, and the bin of deleted ones."""
