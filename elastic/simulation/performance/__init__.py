"""The performance world: what a run would cost and how fast it would be, with modelled devices on virtual time."""

from elastic.simulation.performance.episodes import Episode, Episodes, EpisodeTurn
from elastic.simulation.performance.profile import Profile, ProfileError, load_profile, profile_names
from elastic.simulation.performance.run import SimulatedRun, SimulationError
