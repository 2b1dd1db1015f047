"""Requests that other processes answer."""
