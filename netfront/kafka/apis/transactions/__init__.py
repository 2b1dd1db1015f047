"""Transactions of Kafka producers, on the transactions of the appliance.

InitProducerId makes the client the owner of its transactional id. AddPartitionsToTxn and
AddOffsetsToTxn need no work: a transaction has the partitions that its batches open. The offsets of
TxnOffsetCommit wait here, and travel with the commit, which decides all at once.

Invariants:
- A request of another owner, or of an earlier one, is refused (PRODUCER_FENCED): what the client
  knows must be what it was last given. So is one of another user
  (TRANSACTIONAL_ID_AUTHORIZATION_FAILED).
- A transaction commits with all offsets that were accepted for it, or aborts (`is_incomplete`).
"""
