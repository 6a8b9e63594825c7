"""Schedulers' configurations, features, requests and model runners, drawn from a seed."""
