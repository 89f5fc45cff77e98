package api

// PathRevocations takes a revocation list of the node's network:
// POST RevokeRequest → RevokeResult.
const PathRevocations = "/v1/revocations"

// RevokeRequest gives the node a list that the network's authority signed.
type RevokeRequest struct {
	List []byte `json:"list"` // base64 in JSON
}

// RevokeResult says that the node goes by the list now and tells the others.
type RevokeResult struct {
	Peers int `json:"peers"` // that it is connected to
}
