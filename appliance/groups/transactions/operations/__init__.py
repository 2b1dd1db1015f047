"""Operations on a transactional id: a new owner, its branches, its end by the owner or by time."""
