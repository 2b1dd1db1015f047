"""Tests of workers.log.producers."""
