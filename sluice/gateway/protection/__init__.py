"""Bounds what one client can cost: slow connections, slow bodies, many connections, foreign web pages."""
