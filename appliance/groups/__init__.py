"""Consumer groups and share groups: members, assignments, committed offsets.

`service.GroupService` is the whole of it without processes and lanes; `agent` runs it.
"""
