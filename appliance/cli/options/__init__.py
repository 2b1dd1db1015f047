"""Options that commands share, and what they name: contexts, configuration files, the control
socket.
"""
