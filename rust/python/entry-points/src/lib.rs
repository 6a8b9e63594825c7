//! `#[entry_points]`: each function that Python can call runs in a guard that turns a panic into an exception.
//!
//! An attribute, so that no body needs a closure of its own and `tests/unit/test_layout.py` sees
//! whether one is missing.

use proc_macro2::{Group, Ident, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{Attribute, Block, ImplItem, Item, Result, Signature, parse_macro_input, parse_quote};

/// Guards the methods of a class, `#[entry_points(Class)]` above `#[pymethods]`, or a function,
/// `#[entry_points]` above `#[pyfunction]`.
///
/// A body runs in `crate::guard::enter`, under the name `Class.method`. That of a method with
/// `#[by(guard)]` runs in `self.guard`, which gets the name and a closure over `self`: for calls
/// after whose panic something has to be done.
#[proc_macro_attribute]
pub fn entry_points(
    class: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    let mut item = parse_macro_input!(item as Item);
    let guarded = match &mut item {
        Item::Fn(it) => guard("", &mut it.attrs, &it.sig, &mut it.block),
        Item::Impl(methods) => methods.items.iter_mut().try_for_each(|it| match it {
            ImplItem::Fn(it) => guard(&format!("{class}."), &mut it.attrs, &it.sig, &mut it.block),
            _ => Ok(()),
        }),
        other => Err(syn::Error::new_spanned(other, "neither a function nor methods")),
    };
    guarded.map_or_else(syn::Error::into_compile_error, |()| item.into_token_stream()).into()
}

fn guard(
    prefix: &str,
    attributes: &mut Vec<Attribute>,
    signature: &Signature,
    body: &mut Block,
) -> Result<()> {
    let name = format!("{prefix}{}", signature.ident);
    let by = attributes.iter().position(|it| it.path().is_ident("by"));
    *body = match by.map(|index| attributes.remove(index)) {
        None => parse_quote!({ crate::guard::enter(#name, || #body) }),
        Some(by) => {
            let guard: Ident = by.parse_args()?;
            let body = with_this(quote!(#body));
            parse_quote!({ self.#guard(#name, |this| #body) })
        }
    };
    Ok(())
}

/// Tokens in which `this` stands for `self`, which can't be a closure's parameter.
fn with_this(tokens: TokenStream) -> TokenStream {
    let renamed = tokens.into_iter().map(|token| match token {
        TokenTree::Ident(it) if it == "self" => Ident::new("this", it.span()).into(),
        TokenTree::Group(group) => {
            let mut renamed = Group::new(group.delimiter(), with_this(group.stream()));
            renamed.set_span(group.span());
            renamed.into()
        }
        other => other,
    });
    renamed.collect()
}
