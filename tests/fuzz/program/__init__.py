"""The fuzzer of programs: random public calls of all clients, held against a model of what they
promise.
"""
