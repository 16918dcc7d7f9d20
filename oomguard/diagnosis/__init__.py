"""Diagnose a failure: facts to ranked causes, budget and actions.

The rules' own tests run here too.
"""
