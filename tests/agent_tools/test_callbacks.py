"""Callback tools."""
