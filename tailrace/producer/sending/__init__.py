"""The sender: sends batches, handles responses and retries, and the threads that drive it."""
