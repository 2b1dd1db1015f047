"""Share groups: many members take records of one partition from a queue, each record under a lock
(KIP-932).
"""
