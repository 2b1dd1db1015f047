"""Who owns the socket: sessions, credits, answers and fetches."""
