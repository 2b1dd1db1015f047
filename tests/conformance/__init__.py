"""Promises of every client, whatever drives it: a thread or an event loop, the compiled kernel or
its reference, gevent.
"""
