"""What every client keeps to, whoever drives it: a thread or an event loop, the compiled kernel or
its reference, gevent.
"""
