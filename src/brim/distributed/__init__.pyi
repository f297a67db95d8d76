from .dealing import deal as deal
from .launch import Place as Place
from .ranks import ALONE as ALONE, PeerError as PeerError, Ranks as Ranks, joined as joined
from .reduction import Reduction as Reduction, Share as Share
