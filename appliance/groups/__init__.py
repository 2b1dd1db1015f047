"""Consumer groups and share groups: members, assignments, committed offsets.

`agent.service.GroupService` handles requests without knowing processes or lanes. `agent.agent` runs
it.
"""
