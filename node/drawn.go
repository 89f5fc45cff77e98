package node

import (
	"kvasird/experts/place"
	"kvasird/market"
)

// among says from how many independent replicas what a node computes of a model is drawn, as they
// announce themselves: the fewest, over the experts that it serves, of holders with different
// owners. It is 0 for who runs the model for clients, since that one chooses by itself, and for
// who serves no experts: a ring's stages are chosen by their speed.
func among(holders []market.Holder, node string, owner func(peer string) string) int {
	var all []place.Holder
	var its []place.Block
	for _, h := range holders {
		blocks := servedBlocks(h.News.Holdings)
		if h.Peer == node {
			if h.News.Backbone || h.News.Service.Slots > 0 {
				return 0
			}
			its = blocks
		}
		all = append(all, place.Holder{Owner: owner(h.Peer), Blocks: blocks})
	}
	if len(its) == 0 {
		return 0
	}
	fewest := len(all)
	for _, b := range its {
		fewest = min(fewest, place.Among(all, b))
	}
	return fewest
}

// servedBlocks are the experts that are computed now.
func servedBlocks(list []market.Holding) (out []place.Block) {
	for _, h := range list {
		if h.State == market.Serving {
			out = append(out, place.Block{
				FromLayer: int32(h.Slice.Layers.Begin), ToLayer: int32(h.Slice.Layers.End),
				From: int32(h.Slice.Experts.Begin), To: int32(h.Slice.Experts.End),
			})
		}
	}
	return out
}
