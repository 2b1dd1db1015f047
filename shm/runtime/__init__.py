"""Process runtime: start-up, the agent loop, error handling and logging of every process."""
