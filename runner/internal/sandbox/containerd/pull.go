package containerd

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/errdefs"
	"github.com/containerd/containerd/images"
	"github.com/containerd/containerd/platforms"
	"github.com/containerd/containerd/reference/docker"
	"github.com/containerd/containerd/remotes"
	remote "github.com/containerd/containerd/remotes/docker"
	remoteerrors "github.com/containerd/containerd/remotes/errors"
	"github.com/containerd/log"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sirupsen/logrus"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// pullTimeout is how long one image may take. Starts that wait for it may give
// up earlier; it goes on for those that come later.
const (
	pullTimeout      = 15 * time.Minute
	answerOfRegistry = time.Minute // until the first byte of each
)

// pull is one under way.
type pull struct {
	done chan struct{}
	err  error
}

// pull gets an image from its registry, once for all who ask meanwhile.
func (m *maker) pull(ctx context.Context, named docker.Named) error {
	host, name := docker.Domain(named), named.String()
	if !slices.Contains(m.cfg.Registries, host) {
		return unavailable(nil, "the image %s is not on this runner, and its settings allow no pull from %s", docker.FamiliarString(named), host)
	}
	m.mu.Lock()
	p := m.pulls[name]
	if p == nil {
		p = &pull{done: make(chan struct{})}
		m.pulls[name] = p
		m.working.Go(func() {
			p.err = m.fetch(named)
			m.mu.Lock()
			delete(m.pulls, name)
			m.mu.Unlock()
			close(p.done)
		})
	}
	m.mu.Unlock()
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return errors.Join(unavailable(nil, "the image %s is still being pulled from %s; try again later", docker.FamiliarString(named), host), context.Cause(ctx))
	}
}

func (m *maker) fetch(named docker.Named) error {
	ctx, cancel := context.WithTimeout(m.scope(m.pulling), pullTimeout)
	defer cancel()
	ctx = log.WithLogger(ctx, quiet()) // it writes addresses as they are
	began := time.Now()
	client, err := m.connect()
	if err != nil {
		return err
	}
	size := &sizer{most: m.cfg.MaxImageMB << 20}
	_, err = client.Pull(ctx, named.String(),
		containerd.WithPlatformMatcher(platforms.Default()),
		containerd.WithResolver(m.resolver()),
		containerd.WithPullSnapshotter(m.cfg.Snapshotter),
		containerd.WithPullUnpack,
		containerd.WithImageHandlerWrapper(size.wrap),
	)
	familiar := docker.FamiliarString(named)
	if err != nil {
		m.log.Warn("image was not pulled", "image", familiar, "error", redact(err))
		return pullError(familiar, docker.Domain(named), err)
	}
	m.log.Info("image was pulled", "image", familiar, "took", time.Since(began))
	return nil
}

// resolver speaks to the image's registry with the credentials of that host.
func (m *maker) resolver() remotes.Resolver {
	credentials := func(host string) (string, string, error) { return credentialsOf(m.cfg.AuthFile, host) }
	plain := func(host string) (bool, error) { return slices.Contains(m.cfg.PlainHTTP, host), nil }
	base := http.DefaultTransport.(*http.Transport).Clone()
	base.ResponseHeaderTimeout = answerOfRegistry
	client := &http.Client{Transport: &guard{next: base, registries: m.cfg.Registries, plain: m.cfg.PlainHTTP}}
	authorizer := remote.NewDockerAuthorizer(remote.WithAuthClient(client), remote.WithAuthCreds(credentials))
	return remote.NewResolver(remote.ResolverOptions{
		Hosts: remote.ConfigureDefaultRegistries(remote.WithClient(client), remote.WithAuthorizer(authorizer), remote.WithPlainHTTP(plain)),
	})
}

// quiet is a logger of containerd's kind that says nothing.
func quiet() *log.Entry {
	l := logrus.New()
	l.SetOutput(io.Discard)
	return logrus.NewEntry(l)
}

// sizer refuses an image whose layers are too large before any is fetched.
type sizer struct{ most int64 }

func (s *sizer) wrap(next images.Handler) images.Handler {
	return images.HandlerFunc(func(ctx context.Context, d imagespec.Descriptor) ([]imagespec.Descriptor, error) {
		children, err := next.Handle(ctx, d)
		if err != nil || !images.IsManifestType(d.MediaType) {
			return children, err
		}
		var total int64
		for _, c := range children {
			if c.Size < 0 || c.Size > s.most-total {
				return nil, &tooLargeError{s.most}
			}
			total += c.Size
		}
		return children, nil
	})
}

type tooLargeError struct{ most int64 }

func (e *tooLargeError) Error() string {
	return fmt.Sprintf("it has more than the %d MiB that this runner takes", e.most>>20)
}

// pullError tells what the registry said, without what it was asked with.
func pullError(name, host string, err error) error {
	if e, ok := errors.AsType[*sandbox.StartError](err); ok {
		return e
	}
	cause := errors.New(redact(err))
	if said := registrySaid(err); said != "" {
		return unavailable(cause, "the image %s can't be pulled from %s: %s", name, host, short(said))
	}
	if e, ok := errors.AsType[*sandbox.StartError](startError(err)); ok && e.Message != unknownFailure {
		return &sandbox.StartError{Code: e.Code, Message: e.Message, Cause: cause}
	}
	return unavailable(cause, "the image %s was pulled from %s, but can't be unpacked", name, host)
}

// registrySaid is what of an error comes from the registry or the way there;
// empty: it comes from this machine.
func registrySaid(err error) string {
	if large, ok := errors.AsType[*tooLargeError](err); ok {
		return large.Error()
	}
	if astray, ok := errors.AsType[*astrayError](err); ok {
		return astray.Error()
	}
	if status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		return "it answers " + status.Status + saidInBody(status.Body)
	}
	if said, ok := errors.AsType[remote.Errors](err); ok {
		return said.Error()
	}
	if unknown, ok := errors.AsType[*net.DNSError](err); ok {
		return "the name " + unknown.Name + " is not known"
	}
	if failed, ok := errors.AsType[*url.Error](err); ok && !errors.Is(err, context.Canceled) {
		return failed.Err.Error()
	}
	switch {
	case errors.Is(err, remote.ErrInvalidAuthorization):
		return "it does not take this runner's credentials for it"
	case errors.Is(err, context.DeadlineExceeded):
		return "it takes too long"
	case errdefs.IsNotFound(err):
		return "it has no such image"
	case errdefs.IsFailedPrecondition(err):
		return "what it sends is not what the image says"
	}
	return ""
}

// saidInBody is the message of a registry's error.
func saidInBody(body []byte) string {
	var answer remote.Errors
	if json.Unmarshal(body, &answer) != nil || len(answer) == 0 {
		return ""
	}
	return ": " + answer.Error()
}

// short bounds what a registry says.
func short(s string) string {
	s = strings.ToValidUTF8(strings.Join(strings.Fields(s), " "), "\uFFFD")
	if len(s) > 300 {
		return strings.ToValidUTF8(s[:300], "") + "…"
	}
	return s
}

// redact takes the queries out of addresses, which may hold a signature or a
// token.
func redact(err error) string {
	words := strings.Fields(err.Error())
	for i, w := range words {
		if at := strings.Index(w, "://"); at >= 0 {
			if q := strings.IndexByte(w, '?'); q > at {
				w = w[:q] + "?…"
			}
			if user := strings.LastIndexByte(w, '@'); user > at {
				w = w[:at+3] + "…" + w[user:]
			}
			words[i] = w
		}
	}
	return strings.Join(words, " ")
}

func unusable(cause error) error {
	return unavailable(cause, "this runner's credentials for registries can't be read")
}

// credentialsOf reads a file as docker login writes it. It is read each time,
// so that a rotated password needs no restart.
func credentialsOf(path, host string) (user, secret string, err error) {
	if path == "" {
		return "", "", nil
	}
	blob, err := os.ReadFile(path)
	if err != nil {
		return "", "", unusable(err)
	}
	var file struct {
		Auths map[string]struct {
			Auth, Username, Password, IdentityToken string
		}
	}
	if err := json.Unmarshal(blob, &file); err != nil {
		return "", "", unusable(fmt.Errorf("%s is not JSON as docker login writes it", path))
	}
	names := []string{host, "https://" + host, "http://" + host, "https://" + host + "/v1/", "https://" + host + "/v2/"}
	if host == "registry-1.docker.io" {
		names = append(names, "docker.io", "https://index.docker.io/v1/")
	}
	for _, name := range names {
		entry, ok := file.Auths[name]
		switch {
		case !ok:
			continue
		case entry.IdentityToken != "":
			return "", entry.IdentityToken, nil
		case entry.Auth == "":
			return entry.Username, entry.Password, nil
		}
		plain, err := base64.StdEncoding.DecodeString(entry.Auth)
		user, secret, ok = strings.Cut(string(plain), ":")
		if err != nil || !ok {
			return "", "", unusable(fmt.Errorf("the auth of %s is not base64 of user:password", name))
		}
		return user, secret, nil
	}
	return "", "", nil
}
