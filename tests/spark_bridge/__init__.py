"""Tests of spark_bridge."""
