"""Share groups: several members acquire single records of the same partitions, each under a lock
(KIP-932).
"""
