"""Administration of users, rights and quotas by Kafka's tools."""
