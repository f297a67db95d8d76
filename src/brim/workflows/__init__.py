"""Carry out each thing that a user can ask for as one straight line over the packages below.

No package below imports a workflow.
"""
