"""A run of the suite: the order of its tests, the import graph, the documents, a task's waits."""
