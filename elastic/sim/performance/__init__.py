"""The performance world: what a run would cost and how fast it would be, with modelled devices on virtual time."""

from elastic.sim.performance.episodes import Episode, Episodes, Turn
from elastic.sim.performance.profile import Profile, ProfileError, load_profile, profile_names
from elastic.sim.performance.run import Chronicle, SimulatedRun, SimulationError, Spending

__all__ = [
    "Chronicle",
    "Episode",
    "Episodes",
    "Profile",
    "ProfileError",
    "SimulatedRun",
    "SimulationError",
    "Spending",
    "Turn",
    "load_profile",
    "profile_names",
]
