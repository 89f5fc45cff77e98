// Package store keeps model files of which any part may be missing: sparse files,
// byte-identical to the originals, with the set of the verified groups of 256 KiB
// beside them. It fills from untrusted hands, resumes after a crash, and takes
// complete local GGUF files in without copying them.
//
// It is not for fetching (see p2p/fetch) and does not decide what to hold or to drop.
// It is pure Go. One process uses a folder at a time; who opens it sees to that.
//
// # What holds at any moment, also after a crash
//
//   - Bytes are written only after their group was compared with the Bao tree of the
//     file, and the tree only after all of it was walked up to the root hash, which
//     the model id vouches for. So what is wrong is known by who sent it.
//   - Data are durable before the set on disk says that they are held. A set that is
//     torn, or of another file, counts as empty.
//   - Groups leave the set durably before their bytes are given back to the disk.
//   - The space taken never exceeds the limit: it is charged before it is used.
//
// Until they are flushed (which begins 64 MiB or one second later), new groups are held in
// this process only: a crash loses them, 256 MiB at most, and the space they took is
// reclaimed at Open.
//
// # On disk
//
//	<model id: 64 hex digits>/
//	  manifest.json                 what the model is, see manifest.go
//	  tree-00001                    outboard Bao tree of the first file, see tree.go
//	  held-00001                    its verified groups, see heldset.go
//	  model.gguf                    its data; of a split set model-00001-of-0000N.gguf
//	  kept-model.gguf               in its place a clone or a link of an imported file, see keep.go
//	.new-*, .trash-*, *.tmp         left by a crash, removed by Open
//
// No name that a peer sent reaches the disk. A file that was imported is only ever read:
// the manifest says where the user has it and how it is kept, and by which size, time and
// inode a change is noticed. That much is trusted until Verify hashes it again. A clone
// does not see what the user does with his file; a link sees changes and outlives its
// deletion; a file that is only named must stay where it is.
//
// The limit is for what the store takes beside the user's own files, so a clone or a link
// is not counted: it shares its blocks with the user's file. When that is deleted they stay
// in use, no more than were before, until the model is removed.
//
// # Concurrency
//
// Store and Model are safe for concurrent use; groups are verified and written in
// parallel by who calls. Locks are taken in the order Store.importMu, Store.opMu,
// Model.flushMu, Model.mu, Store.mu.
package store
