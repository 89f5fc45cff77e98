package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// How the bytes of an imported file are kept.
const (
	keptClone = "clone" // a copy of the store's own, which shares its blocks with the file as long as neither is changed
	keptLink  = "link"  // a second name of the file
)

const keptPrefix = "kept-"

// Kept reports whether a file of a model's folder, by its name, is a clone or a link of the
// user's, which no limit counts.
func Kept(name string) bool { return strings.HasPrefix(name, keptPrefix) }

// keptName returns the name of a kept file, such as llama.cpp wants it for a split set. It
// is no name of data of the store's own, so nothing ever writes to it.
func keptName(i, count int) string { return keptPrefix + dataName(i, count) }

// keep has the folder of a model hold on to imported files, so that they stay when the
// user moves or deletes his: it clones all of them where the file system can, else links
// all of them, else leaves them where they are. It returns them as they are kept.
func (s *Store) keep(dir string, sources []source) []source {
	for _, way := range []struct {
		name string
		take func(from, to string) error
	}{{keptClone, s.disk.cloner()}, {keptLink, os.Link}} {
		if kept, err := s.keepAs(way.name, way.take, dir, sources); err == nil {
			return kept
		}
	}
	for i := range sources {
		removeKept(dir, i, len(sources)) // of a former import; else the next load does
	}
	return sources
}

// removeKept removes what a folder keeps of file i, if anything.
func removeKept(dir string, i, count int) error {
	err := os.Remove(filepath.Join(dir, keptName(i, count)))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (s *Store) keepAs(way string, take func(from, to string) error, dir string, sources []source) ([]source, error) {
	var kept []source
	for i, src := range sources {
		path := filepath.Join(dir, keptName(i, len(sources)))
		k, err := s.keepFile(way, take, src, path)
		if err != nil {
			return nil, err
		}
		kept = append(kept, k)
	}
	return kept, s.disk.syncFolder(dir)
}

func (s *Store) keepFile(way string, take func(from, to string) error, src source, path string) (source, error) {
	tmp := path + ".tmp"
	defer os.Remove(tmp) // also after success: two names of one file are not renamed to each other
	err := os.Remove(tmp)
	if errors.Is(err, fs.ErrNotExist) {
		err = s.disk.step(way, path)
	}
	var from string
	if err == nil {
		from, err = filepath.EvalSymlinks(src.Path) // a link is to name the file, not the symbolic link
	}
	if err == nil {
		err = take(from, tmp)
	}
	if err == nil {
		err = s.disk.rename(tmp, path)
	}
	if err != nil {
		return source{}, err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return source{}, err
	}
	now, err := os.Stat(src.Path)
	if err != nil {
		return source{}, err
	}
	k := stamp(src.Path, info)
	k.Kept, k.Origin = way, src.Inode
	if !stamp(src.Path, now).sameFile(src) || !k.user().sameFile(src) || way == keptLink && k.Inode != src.Inode {
		return source{}, fmt.Errorf("%s was changed meanwhile", src.Path)
	}
	return k, nil
}
