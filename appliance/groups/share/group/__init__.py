"""The state of one share group: its members, and what they subscribe to."""
