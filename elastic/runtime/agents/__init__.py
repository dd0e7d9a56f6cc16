"""The driver from outside: trajectories that agents play through fronts, beside the loops of environments."""

from elastic.runtime.agents.chats import CHATS_NOTE, ChatLimits, Chats, ChattingWorkers, ChatTotals, chats_of
from elastic.runtime.agents.env_workers import ENV_WORKERS, EPISODE_HOSTS, EnvWorkerOrder, EnvWorkers, EnvWorkersOrder
from elastic.runtime.agents.hub import Doorkeeper
from elastic.runtime.agents.limits import AgentLimits, EpisodeTimes, EvaluatedSampling
from elastic.runtime.agents.metrics import RunMetrics
from elastic.runtime.agents.requests import RequestRollouts
from elastic.runtime.agents.rollouts import AgentRollouts
from elastic.runtime.agents.service import (
    AgentService,
    AgentsWiring,
    Fronts,
    HostProcesses,
    ServingFronts,
    ServingHosts,
)
from elastic.runtime.agents.upstream import UpstreamBounds
