from .dealing import busy_share as busy_share, deal as deal, lockstep as lockstep
from .launch import Place as Place
from .ranks import ALONE as ALONE, PeerError as PeerError, Ranks as Ranks, joined as joined
from .reduction import Reduction as Reduction, Share as Share
