"""The planner: which pool fraction and how many replicas a trace needs, what that buys and how sure
it is.
"""
