"""The transaction coordinator: who owns a transactional id, and how its transactions end."""
