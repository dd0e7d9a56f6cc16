"""Agents as clients of a run: fronts are modelled, and speak to it by production code (`elastic.front.link`)."""
