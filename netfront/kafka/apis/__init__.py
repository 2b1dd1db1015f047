"""APIs of Kafka, a file for each subject."""
