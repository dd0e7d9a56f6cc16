"""The performance world: what a run would cost and how fast it would be, with modelled devices on virtual time."""

from elastic.sim.performance.episodes import Episode, Episodes, EpisodeTurn
from elastic.sim.performance.profile import Profile, ProfileError, load_profile, profile_names
from elastic.sim.performance.run import SimulatedRun, SimulationError
