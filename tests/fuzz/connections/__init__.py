"""The protocol fuzzer and the flood of strangers: many connections at a running appliance."""
