"""Reading topics with Spark: `spark.read.format("tailrace")`."""
